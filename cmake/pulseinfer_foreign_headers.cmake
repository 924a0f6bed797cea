# Headers, relative to include/, that cannot be compiled without a foreign runtime (torch, DLPack...).
set(PULSEINFER_FOREIGN_HEADERS "")
