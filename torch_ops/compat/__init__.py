"""Other libraries' signatures over the ops."""
