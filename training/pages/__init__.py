"""Builds pages of HTML, and Matplotlib figures with fonts for any script."""
