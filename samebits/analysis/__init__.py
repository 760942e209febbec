"""Questions asked of runs. Analysis starts runs and reads their records; no run imports it."""
