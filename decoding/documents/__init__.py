"""Reading strict YAML documents, and writing files whole or not at all. Imports nothing of sdtune but its errors."""
