"""``meshmark trace``: whom to ask for a flow, what of the answers is shown, and in which form."""
