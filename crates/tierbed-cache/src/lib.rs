//! Did we see these rows lately? Row tiers in DRAM over any store.
