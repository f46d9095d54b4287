#![doc = include_str!("../README.md")]

#[cfg(feature = "python")]
mod python;
