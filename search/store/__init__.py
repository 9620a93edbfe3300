"""The tuning database: what is stored, how it is read and checked, moved and looked after."""
