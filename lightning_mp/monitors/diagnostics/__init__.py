"""What monitors report and steps raise: outcomes, reports, findings and errors; the callbacks wire them into a run."""
