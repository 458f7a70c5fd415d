"""The papers' figures, made anew: one small file each, from journals or recordings."""
