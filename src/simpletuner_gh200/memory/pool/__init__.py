"""Grace memory for torch's own tensors: a small allocator in C, its mechanisms, and which of them is taken here."""
