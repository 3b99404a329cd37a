//! Models of what people use today, as published: to compare with.

pub mod caching;
pub mod gmlake;
pub mod native;
pub mod stalloc;
