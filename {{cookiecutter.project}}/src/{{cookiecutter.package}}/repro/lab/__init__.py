"""The lab launches runs and reads their records; no run imports it, so it changes no content address."""
