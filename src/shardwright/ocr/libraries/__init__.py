"""The libraries of others that come with the extra ``ocr``, and the geometry that is asked of them."""
