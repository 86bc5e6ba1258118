"""The intermediate representation: dialects on xDSL, a builder, and interpreters. Loaded for code generation only."""
