"""The foundations of rewriting a captured graph, and the facts about its values that are known at capture."""
