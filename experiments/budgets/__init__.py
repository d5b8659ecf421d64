"""Does a plan keep the budget it was made for, and does the prediction tell the compiler's bytes? See README.md."""
