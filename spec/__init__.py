"""What is meant: attention masks as terms, and everything a term can be turned into."""
