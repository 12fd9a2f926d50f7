//! Reports of runs that went well, were killed, were resumed, or lie.
