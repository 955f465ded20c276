"""The record of what was shown on an H200, and the page that is made from it."""
