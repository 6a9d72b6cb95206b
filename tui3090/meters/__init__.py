"""What is measured beside training, one file a thing; only allocator and flops need torch."""
