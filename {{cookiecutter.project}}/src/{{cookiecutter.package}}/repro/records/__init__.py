"""What is written down: record, receipt, chain of rows, tracking. These files load without torch, for auditors."""
