"""The compiler: asked, read and written, each in one place."""
