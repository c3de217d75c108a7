"""The paper again: its tables and figures as experiments, the runs for them, their records, and tables of ours."""
