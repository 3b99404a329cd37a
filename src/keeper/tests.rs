//! A keeper and a daemon that talk.
