"""`sdtune evaluate service`: jobs of the tuning service under kills, and its storage under load."""
