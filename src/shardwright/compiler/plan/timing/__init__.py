"""The seconds of a step under a plan: those of each operator and transfer, and the time line on which they go on."""
