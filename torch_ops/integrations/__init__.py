"""Other people's models on our ops; one thin module each, none imports another."""
