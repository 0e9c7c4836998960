"""What a command is given: the model, the data set, the prompts, the machine."""
