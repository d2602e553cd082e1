//! Here are page numbers, bring me bytes: devices, engines, folders.
