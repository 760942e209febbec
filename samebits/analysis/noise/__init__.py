"""The noise floor, and how far one ULP grows."""
