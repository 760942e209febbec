"""What a run writes down: its folder, lock, record and receipt. Loads without torch, for auditors."""
