"""`sdtune evaluate`: experiments about sdtune itself. No product code imports this folder."""
