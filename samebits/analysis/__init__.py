"""Questions about runs. Analysis starts runs and reads their records; no run imports it."""
