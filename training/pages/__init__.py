"""What pages and pictures are made of: a page of HTML, figures, fonts."""
