"""What a monitor knows, without hooks: reports, tables and plots; the callbacks wire them into a run."""
