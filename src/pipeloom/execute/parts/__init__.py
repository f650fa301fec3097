"""What an executor is made of: a part for each group of kinds, all with the protocol of ``part.Part``."""
