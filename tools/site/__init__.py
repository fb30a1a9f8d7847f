"""The documentation site: pages generated from the sources, and links that work on a forge and on the site."""
