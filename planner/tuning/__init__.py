"""A session with its device and database, and what it does offline: plan each region, look ahead, sum up."""
