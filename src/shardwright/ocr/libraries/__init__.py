"""The libraries of the optional extra ``ocr``, and the geometry computed with them."""
