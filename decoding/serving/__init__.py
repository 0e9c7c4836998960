"""The server: requests that come and go, decoded together. `batch` decodes and knows no thread or network."""
