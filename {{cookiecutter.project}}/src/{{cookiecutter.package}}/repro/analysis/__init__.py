"""Questions asked of runs. The lab starts runs and reads their records; no run imports it."""
