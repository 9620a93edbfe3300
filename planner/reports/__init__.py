"""What the database holds, as frames, tables, plots and pages; and a plan in words."""
