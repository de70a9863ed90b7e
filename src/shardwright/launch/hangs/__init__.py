"""Where ranks are that get nowhere, and which one holds the others up."""
