"""The engines that an export is written for, one module each."""
