//! Here are ids, give me one vector per bag: the engine over all parts.
