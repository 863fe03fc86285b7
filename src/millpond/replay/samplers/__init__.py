"""Which items a sample returns: the protocol, and the samplers that come with it."""
