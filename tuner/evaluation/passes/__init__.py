"""What single passes and rounds cost: by width, by context, by readiness."""
