"""Messages to tokens and back, exactly."""
