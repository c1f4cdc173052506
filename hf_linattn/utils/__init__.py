"""What all parts of the package use; nothing here imports from them."""
