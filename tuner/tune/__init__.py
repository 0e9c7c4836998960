"""`sdtune tune`: the speculation that an engine has itself, n-grams, suffixes or a draft model, set for a text and a load."""
