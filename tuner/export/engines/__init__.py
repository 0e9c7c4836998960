"""The engines that an export is written for: those that need code, and one class for those that a data file describes."""
