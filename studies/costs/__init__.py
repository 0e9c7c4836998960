"""What any draft's passes cost, fitted from a few that were timed. Never times anything itself."""
