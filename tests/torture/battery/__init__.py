"""Every route with the largest bodies that it takes, one dimension of its schema at a time."""
