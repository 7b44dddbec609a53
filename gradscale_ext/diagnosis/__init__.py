"""Why a parameter has no gradient."""
