// SPDX-License-Identifier: Apache-2.0

//! What the recorder and the tests on a mock fleet are made of: a deployment of Dynamo in one
//! process, without services besides files of one folder.

pub mod deployment;
pub mod settings;
